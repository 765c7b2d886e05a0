"""The router: OpenAI HTTP in front, encode and prefill+decode instances behind.

Media bytes are neither decoded nor encoded again on their way through. Starts without torch.
"""
