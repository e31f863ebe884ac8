"""Model files that tests write: small GGUFs, right and wrong ones, and the models of whole engines."""
