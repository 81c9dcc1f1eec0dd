"""What people and programs get to see: facts in, text or JSON-ready objects out.

Every file here is one screen.  None of them reads the machine: the commands pass the facts in.
"""
