"""What is shipped, the Debian packages and what PyPI gets: built, looked at, installed on machines of its own."""
