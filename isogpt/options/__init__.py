"""What did the user type? Settings and their values."""
