"""The ways to read the model's files, one file each: the file's name is the mode's, with `-` for `_`.

Every file here is a mode that a user can name; nothing lists them elsewhere. It has a class `Reader`, a
`FileReader` (`reader.py` says what that must have).
"""
