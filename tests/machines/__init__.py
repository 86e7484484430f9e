"""What the broker promises, tested on other kernels, in virtual machines: ``make test-kernels``.

Read in this order: `promises` (the machines, and which tests show which promise), `payload` (what a machine gets),
``__main__``, which runs the machines, `kept_results` (docs/kernels.json), and `report` (the tables in
docs/compatibility.md). `installed`, `engines`, `labels` and `too_old` have tests that only run on the machines.
"""
