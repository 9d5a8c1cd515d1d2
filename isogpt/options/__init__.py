"""What did the user type? Settings, their values, and the names and files of other tools."""
