"""Numbers for monitoring systems: Prometheus, node_exporter, InfluxDB.

families makes them of facts, exposition spells them, server answers scrapes.
"""
