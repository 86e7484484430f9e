"""Fuzz tests: the parsers refuse input of an untrusted peer with their own message, or parse it correctly.

- `targets`       the fuzz targets: one module each, with the check that every input must pass;
- `engine`        runs one target under atheris, which searches for inputs that reach new code (a separate process);
- `__main__`      runs the engine on each target for a number of seconds: ``make fuzz``;
- `corpus`        inputs that every test run replays: written by hand, or found by the engine and reduced;
- `test_fuzz`     replays them, and waits for the engine run that `conftest` starts with the session.
"""
