"""How do processes find each other and agree?"""
