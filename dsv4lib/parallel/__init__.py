"""Run one model on several ranks, a process each, over torch.distributed: NCCL on GPUs, Gloo on a CPU.

| module    | what                                                                                    |
|-----------|-----------------------------------------------------------------------------------------|
| `plan`    | sizes of the groups, checked against a model; which share a rank holds                  |
| `group`   | the communicator of a group of ranks, and the groups of a rank                          |
| `watch`   | ends all ranks when one dies or stands still, and says which                            |
| `launch`  | processes on this machine: start them, end them together                                |
| `serving` | a scheduler whose ranks keep step; requests divided, tokens gathered                    |

Which numbers are the same bits on any plan, and which within bounds:

| what is divided                        | how ranks agree                           | against one rank              |
|----------------------------------------|-------------------------------------------|-------------------------------|
| vocabulary, heads, wo_a by groups      | outputs are put side by side              | the same bits                 |
| routed experts                         | rows come back; the home rank adds them   | the same bits                 |
| requests                               | nothing is shared                         | the same bits                 |
| wo_b, w2 of the shared expert; wo_a in | fp32 addends, added in the order of the   | another order of fp32 sums,   |
| a model of one group of heads          | ranks on every rank                       | rounded to bf16 once          |

All ranks of a tensor group have the same bits, whatever the plan: each adds the same numbers in the same order. "The
same bits" holds for kernels whose bits do not depend on how many tokens or heads a call has: those of a model that is
``batch_invariant``. On a Hopper no model is: `linear` splits K by tokens and columns, attention its keys and mHC its
sums by tokens. Nor are experts in mode ``mxfp4_mixed`` anywhere.
"""
