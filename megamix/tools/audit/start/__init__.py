"""Folder that comes first on the path of a script under audit.

sitecustomize  the module that Python imports by itself at its start
"""
