name_of_node[1-2]
