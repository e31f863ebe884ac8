"""The eviction policies, one file each: the file's name is the policy's, with `-` for `_`.

Every file here is a policy that a user can name; nothing lists them elsewhere. `rule.py` says what a file must
have.
"""
