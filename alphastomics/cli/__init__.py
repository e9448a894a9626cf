"""The command line: arguments enter, a call of the package leaves."""
