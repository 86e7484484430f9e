"""Fuzzing: whatever an untrusted peer may write, the parsers refuse it in their own words or understand it rightly.

- `targets`       what is fuzzed: one module each, with the check that every input has to pass;
- `engine`        one target under atheris, which looks for inputs that reach new code (a process of its own);
- `__main__`      runs the engine on each target for so many seconds: ``make fuzz``;
- `corpus`        inputs that every test run replays: made by hand, or found by the engine and reduced;
- `test_fuzz`     replays them, and joins the run of the engine that `conftest` began with the session.
"""
