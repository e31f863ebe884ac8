"""The command line: app.py has the commands and their exit codes; one file for each larger one, and what they print."""
