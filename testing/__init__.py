"""The process harness of tests and scripts: real processes, invented neighbours, and what they are asked.

Not part of the installed package, and nothing in `appliance/` imports it.
"""
