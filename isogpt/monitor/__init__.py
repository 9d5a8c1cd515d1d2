"""What does a run tell, and what stops it?"""
