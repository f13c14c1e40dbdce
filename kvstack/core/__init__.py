"""
The shared vocabulary of every room. Pure.
"""
