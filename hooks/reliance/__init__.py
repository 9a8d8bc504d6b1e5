"""What the hooks rely on in vLLM, in one table, and whether a vLLM has it.

``relied_on`` is the table, ``fit`` judges one of its rows, ``live_vllm`` looks rows up in the
installed vLLM, ``conditions`` where it asks for what we set, ``releases`` says which releases were
compared.
"""
