"""Parts of the throughput study, `eval/throughput.py`."""
