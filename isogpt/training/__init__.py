"""What does a step do to the weights?"""
