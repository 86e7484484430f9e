"""Messages between the processes: typed records, one module for each conversation. Nothing here acts.

A receiver loads a record only if it has exactly the fields of its class, each within its bounds (`records`,
`quantities`). A compromised process can therefore send nothing but these records:

- `supervisor`: between supervisor and front.
- `mounter`: between front and mounter, for callers and volumes; `maintenance`: the broker's own operations there.
- `csi`: between CSI plugin and front.

The other modules hold what several processes must agree on: `mount_options` (the grammar of ``-o``), `refusal`,
`volume_sockets`, `csi_settings` (the plugin's command line), `process_names`, `sharing_key`; and what they say to
people: `log_sentences`, and callers' words in it and elsewhere (`untrusted_text`).
"""
