"""How is the work divided?"""
