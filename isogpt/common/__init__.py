"""What does every room use? Printing, files, random numbers."""
