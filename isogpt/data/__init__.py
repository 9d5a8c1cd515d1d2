"""Which tokens does step s read?"""
