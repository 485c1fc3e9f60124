"""Run a whole plan again and again, on one machine or on many: `./dsv4 nightly`. README.md has its recipes.

| module | what it has |
| --- | --- |
| `plan` | stages x parameters x back ends, as jobs; its hash; time budgets |
| `shard` | parts of a plan, the same on every machine |
| `local`, `cluster` | executors: processes of this machine, workers of a dask.distributed scheduler |
| `remote` | what a worker of such a scheduler does |
| `gather` | shards of one night, read as one run |
| `ledger` | checks with several verdicts on one commit |
| `retention` | which runs are kept |
| `command`, `options` | the command, its options |
"""
