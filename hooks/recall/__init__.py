"""What copies say, and how much of a prompt they cover at other positions.

Nothing here knows vLLM: ``span_index`` finds text by its tokens (``fingerprints`` of windows, in
``said_blocks``), ``cover`` lays found spans along a prompt, ``gate`` says what of that a
calibration of the model allows, and ``splicer`` moves what was found.
"""
