"""The screen of `gpuguard top`.

scene holds what is shown, page makes lines of it for any terminal, app is the screen of textual.
"""
