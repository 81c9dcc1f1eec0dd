"""The page in the browser: live devices, processes, claims, the waiting line, events and charts.  It only shows.

feed looks at the machine, once for all who watch, and remembers; server answers; page/ is what the browser gets, with
uPlot (MIT) beside our own script, so that nothing comes from anywhere else.
"""
