"""Does an edited model still compute what one process computes?"""
