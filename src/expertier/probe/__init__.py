"""Measures once how fast this machine moves bytes and computes; `expertier plan` predicts speeds from the result.

engine_rates.py   the engine's own rates: a layer, a byte of weights, a missed expert from L2 and the page cache
file_rates.py     the page cache and the disk under the model, cold and direct
device_rates.py   a device's link, the copies between slots, and the time to read ids back
probe.py          all rates as one document, saved in the cache folder
"""
