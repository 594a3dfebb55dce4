"""What broke and whose fault it is: the pair check, which names nodes that are bad or slow before ranks start on them."""
