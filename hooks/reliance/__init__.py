"""What the hooks rely on in vLLM, stated in one table, and whether a vLLM has it.

``relied_on`` is the table, ``fit`` judges one of its rows, ``live_vllm`` looks rows up in the vLLM
that is installed, ``releases`` says which releases were looked through.
"""
