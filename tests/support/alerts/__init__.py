"""What tests of alerts share: run directories whose ledger and status real controllers have made."""
