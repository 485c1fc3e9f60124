"""Train and evaluate a nano DeepSeek-V4. Text, recipe, training, checkpoint, and what each precision costs.

| module     | what                                                                                       |
|------------|--------------------------------------------------------------------------------------------|
| `settings` | dimensions of the model and of a run                                                       |
| `corpus`   | the CC0 text: fetched, checked by sha256, split; windows of it                             |
| `far`      | synthetic windows that can be predicted only from bytes more than 1,000 positions back     |
| `network`  | the model as functions over whole windows, for training                                    |
| `recipe`   | initial weights, Muon and AdamW, schedule, rounding of weights during training             |
| `training` | the loop, its loss curve, the checkpoint                                                   |
| `variants` | what a precision or a selection of entries changes in `reference.model.ReferenceModel`     |
| `evaluate` | bits per byte, KL and greedy agreement of the variants, with bootstrap intervals           |
"""
