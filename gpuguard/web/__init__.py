"""The page in the browser: live devices, processes, claims, the queue, events and charts.  It only shows.

feed samples the machine, once for all viewers, says how often, and remembers; server answers; page/ is what the browser
gets, with uPlot (MIT) beside our own script, so that nothing comes from anywhere else.
"""
