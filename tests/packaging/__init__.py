"""The Debian packages: built in clean trees, looked at, installed on machines of their own."""
