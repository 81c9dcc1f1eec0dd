"""What the daemon does for whoever knocks: its socket, whom it spares, the locks that it gives.

And what it owes systemd.
"""
