"""PGCL after a warm-up by InfoNCE: is it above InfoNCE, and where PGCL alone loses, why?"""
