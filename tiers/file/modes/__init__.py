"""The ways to read the model's files, one Python file each.

Every Python file here is a mode that a user can name: its name, with `-` for `_`. There is no other list of the modes.
The file has a class `Reader`, derived from `FileReader` (`tiers/file/reader.py`).
"""
