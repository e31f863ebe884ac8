"""The command line: app.py has the commands and exit codes; larger commands and reports have files of their own."""
