"""Run the CUDA C++ kernels of FlashMLA and DeepGEMM, from a checkout of yours, in the emulator.

    $ export DSV4_FLASHMLA=~/FlashMLA DSV4_DEEPGEMM=~/DeepGEMM DSV4_CUTLASS=~/cutlass
    $ python -m dsv4lib.bench.cpp_peers                     # all cases: numbers, findings, instruction counts
    $ python -m dsv4lib.bench.cpp_peers flash_mla_decode    # one

Nothing of them is here. `build` compiles a file of a few lines that includes the checkout's headers, by nvcc, host code
and all, and links it with a stand-in for the CUDA runtime (`host`); `library` loads the result. So the package's own
host code makes tensor maps, chooses tiles and launches, and its launches run in the emulator. `cases` says what a case
is, and judges it; inputs and oracles are ours (`flash_mla`, `deep_gemm`).
"""
