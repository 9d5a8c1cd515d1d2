"""What is a layer made of? Everything that model.py reaches."""
