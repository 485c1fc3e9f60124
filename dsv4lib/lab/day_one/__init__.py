"""Run every question that no GPU of ours has answered on one that can, and read what comes back.

`./dsv4 day-one` makes one archive on a machine with a GPU, `./dsv4 day-one --read ARCHIVE` compares it anywhere.
An H200 has run the micro-kernels of SM90 and gave the emulator's bits, and six stages natively.
No B200 has run its half yet, which is tested
with a fake device and a fake driver.

    forms.py      the questions, data/emulator/unconfirmed.csv
    probe.py      a micro-kernel: raw PTX, inputs from a seed, bytes out
    tensor_probes.py, copy_probes.py, register_probes.py   the micro-kernels of SM100 and SM90
    plan.py       steps with their estimated seconds
    worker.py     one step in a process of its own, on the GPU (gpu.py), or on a fake one (differences.py)
    runner.py     all steps, each with a time limit; a file a step, so that a run can go on
    archive.py    one file to send back, read with suspicion
    reading.py    what differs from the emulator; figures.py draws it
"""
