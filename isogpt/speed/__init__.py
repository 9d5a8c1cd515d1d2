"""How fast, how much memory, which layout?"""
