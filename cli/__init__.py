"""The command's own parts: settings from flags, environment and file, errors in one line, tables."""
