"""Numbers for monitoring systems: Prometheus, node_exporter, InfluxDB.

families makes them from facts, exposition writes them out, and server answers scrapes.
"""
