"""The node daemon (``resilio health watch``): checks at their own pace, drains, users' reports.

It uses ``drain``, ``run`` and ``base``. Start reading at ``watch``.
"""
