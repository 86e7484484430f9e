"""What the broker promises, tested on the kernels of other releases, in virtual machines: ``make test-kernels``.

Read in this order: `promises` (which tests show which promise), `payload` (what a machine gets), `report` (the table in
docs/compatibility.md), and ``__main__``, which runs the machines. `installed` is for the machines only.
"""
