"""Policies tried without anybody being hit: on recorded samples, and by unit tests of their own.

Start at backtest.
"""
