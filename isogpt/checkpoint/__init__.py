"""What is on the disk?"""
