"""The waiting line: who stands where, who starts when and why not earlier, for whom devices are kept.

order, booking and plan decide; the others read, sleep and wake.
"""
