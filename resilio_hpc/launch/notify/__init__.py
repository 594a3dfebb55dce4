"""Messages to chats, webhooks and commands, sent by a process of their own.

Start reading at ``notify``.
"""
