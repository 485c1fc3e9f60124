"""What surrounds the layers of a whole DeepSeek-V4: sampling, drafts' verification, tokenizers and the chat encoding."""
